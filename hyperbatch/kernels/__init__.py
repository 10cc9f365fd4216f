"""The fused GPU kernels, each naming the readable reference it must agree with."""

"""Forward and backward in 16 bit; masters, norms and trust ratio in fp32 (seed: Tencent's mixed-precision LARS)."""

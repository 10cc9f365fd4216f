"""The bench verbs, and the emulated cluster they use."""

"""Every kernel in plain PyTorch: the definition of correct, and what runs on a CPU. One file per family."""

"""Communication hooks for DDP and FSDP2: lossy gradients, and gradients in narrow number formats."""

"""Number formats that travel in place of float32: 16 bits, int8 and int4 by block, and sparse codes."""

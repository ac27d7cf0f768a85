"""The ground: everything with tensors. Numbers in, token ids out; no trio, no HTTP, no clocks, no requests."""

"""Our own format: sharded safetensors files under a manifest."""

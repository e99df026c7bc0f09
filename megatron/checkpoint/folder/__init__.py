"""The folder that --save and --load name: checkpoints, manifests, digests, retention."""

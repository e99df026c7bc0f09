"""Programs of other Megatrons at the paths that scripts call, as calls of ours."""

"""Where a model is computed: mesh, partition, one class per way of running. Knows nothing of files or logging."""

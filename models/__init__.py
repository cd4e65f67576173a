"""What is computed: models as chains of layers, and their losses. Knows nothing of devices, ranks or strategies."""

"""From a configuration to a model whose parameters are sharded and filled."""

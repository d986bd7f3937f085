"""Engines that sample in this process, over the training weights or an unsharded copy of them."""

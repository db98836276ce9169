"""KLeash: post-training on a KL leash."""

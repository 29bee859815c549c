"""What the tests of the W&B sink need: a reader of `.wandb` files, a loopback server, a run to be
observed."""

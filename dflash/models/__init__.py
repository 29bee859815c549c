"""The target that is tapped, the drafter that is trained, and the geometry and loss between them."""

"""Views of a network by its public objects: metrics, evaluations of checkpoints, curves, scores, the model card."""

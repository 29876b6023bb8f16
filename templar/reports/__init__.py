"""What a network shows of itself: metrics, evaluations of checkpoints, curves, scores, the model card."""

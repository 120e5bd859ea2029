"""What a hand-over keeps of the answers: metrics, tasks, measurements."""

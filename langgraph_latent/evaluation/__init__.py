"""How much of the answers a hand-over keeps: metrics, tasks, and what is measured with them. It shows nothing."""

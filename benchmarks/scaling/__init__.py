"""What averaging costs at a scale that one need not have: the cost model of docs/scaling.md."""

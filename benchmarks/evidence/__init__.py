"""What does not knowing a hyperparameter cost, and what finds it? docs/evidence says what each
script asks."""

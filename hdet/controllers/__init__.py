"""What users construct: each controller binds a rule to the measurements that it needs."""

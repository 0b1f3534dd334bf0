"""The only place that touches a private name of torch, Lightning or Accelerate; imports nothing by itself."""

"""Training over many devices: meshes, shardings, and the pipeline of block representations."""

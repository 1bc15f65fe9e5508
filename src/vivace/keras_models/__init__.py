"""A compiled Keras 3 model on the torch backend as the parts of a Job; see `vivace.Job.from_keras`."""

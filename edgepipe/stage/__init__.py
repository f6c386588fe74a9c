"""One stage of a pipeline: orders steps, prepares their inputs, calls the backend, samples, reports."""

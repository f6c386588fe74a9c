"""Files and batches: thousands of requests in a file, run behind interactive ones."""

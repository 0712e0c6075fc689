"""One module for each trainer that the trainer benchmark measures, run by `storage_libraries.serve`."""

"""Pictures. The only importer of matplotlib."""

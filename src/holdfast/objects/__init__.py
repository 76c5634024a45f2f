"""Objects: records that are written only if they are still what the writer believes."""

"""The page dataset: text in Parquet files, cut into pages of consecutive rows."""

"""Parts of the stand-alone `octavo.PagedAttention`: its batches, its views, the shapes it takes."""

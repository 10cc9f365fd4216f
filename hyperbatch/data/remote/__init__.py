"""Data at an address: s3://, gs:// and whatever else fsspec knows, and http(s):// by Python itself.

    address ── Store ──> ranges of bytes ──┬──> Mirror: whole files in the cache folder, up to a size, one host's ranks
     store.py, http.py, objects.py         │    mirror.py         take turns in fetching them
                                           └──> RemoteShardSource: samples whose shard is not there yet, read by their
                                                source.py          range, ahead of the step

Packed shards are read where they lie, so training starts at once and the cache may be smaller than the set. Archives
and parquet files are fetched first and then opened as any others.
"""

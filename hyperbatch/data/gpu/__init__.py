"""Makes batches on the GPU. The reference is `host.HostMaker`, which makes the same batches on the CPU.

    plan ──> reading.py            threads of this process read files and decode those that the GPU does not; for large
               reader_pool.py      sets, processes do that instead, into pinned memory that they share with this one
               reader_process.py   (the program of such a process)
                 │
                 │ files, pixels
                 v
             maker.py              one thread that talks to the device
               drafts.py             brings the images of a batch to the device, on a stream of its own, while the views
                                     of the batch before are cut
                 nvjpeg.py             decodes the batch's JPEGs in one call: hardware.py drives the GPU's decoding
                                       units, torchvision does the rest
                 ../cache.py           keeps decoded images in device memory; later batches need only their addresses
               render.py             cuts, resizes, mirrors, normalises and casts all views in one launch
                 │
                 │ batch, event
                 v
             the step              its stream waits for the event; the host does not

A set of small images that lies in device memory as one array needs none of the above: `resident.py` draws the samples
of a batch and cuts their views there.

Python's lock is held while the tables of a batch are built, and for some microseconds per file. Reading, checksums,
decoding and copies run without it.
"""

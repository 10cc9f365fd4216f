"""Batches made on the GPU. The reference for all of it is `host.HostMaker`, which makes the same batches on the CPU.

    plan ──> reading.py            threads of this process read files and decode what is not the GPU's; for large sets
               reader_pool.py      processes do that instead, into pinned memory they share with this one
               reader_process.py   (the program of such a process)
                 │
                 │ files, pixels
                 v
             maker.py              one thread that talks to the device
               drafts.py             brings the images of a batch to the device, on a stream of its own, while the views
                                     of the batch before are cut
                 nvjpeg.py             decodes the batch's JPEGs in one call: hardware.py drives the GPU's decoding
                                       units, torchvision does the rest
                 ../cache.py           keeps decoded images in device memory; later batches need their addresses only
               render.py             cuts, resizes, mirrors, normalises and casts all views in one launch
                 │
                 │ batch, event
                 v
             the step              its stream waits for the event; the host does not

A set of small images that lies in device memory as one array needs none of the above: `resident.py` draws the samples
of a batch and cuts their views there.

Python's lock is held for the tables of a batch and some microseconds a file; reading, checksums, decoding and copies
run without it.
"""

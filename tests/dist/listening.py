"""Which addresses a process listens at; as a rank, what its agent's and its own are: python -m listening FILE."""

import ipaddress
import json
import os
import sys
from pathlib import Path


def addresses(pid):
    """{port: address} of the process."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(fd))
        except OSError:  # closed meanwhile
            continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                address, port = local.split(":")
                # Words of 32 bits in the byte order of the host.
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found[int(port, 16)] = str(ipaddress.ip_address(b"".join(words)))
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    said = {"agent": addresses(os.getppid()), "port": os.environ["MASTER_PORT"], "address": os.environ["MASTER_ADDR"]}
    (path.parent / f"seen-{os.environ['RANK']}.json").write_text(json.dumps(said))

"""One of two ranks that exchange over gloo: saves what its scene leaves in `found`.

The globals RANK and FOLDER say which rank it is, and where the scene lies.
"""

import runpy

import torch
import torch.distributed as dist

folder, rank = globals()["FOLDER"], globals()["RANK"]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
found = runpy.run_path(f"{folder}/scene.py", {"RANK": rank})["found"]
torch.save(found, f"{folder}/{rank}.pt")
dist.barrier()
dist.destroy_process_group()

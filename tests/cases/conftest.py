"""ComfyUI in this process, for every test in this folder."""

from sageattention3.demo import host

host.import_comfy()

"""Runs a notebook in the current directory: python execute_notebook.py NOTEBOOK OUT PARAMETERS.

OUT gets the notebook with its outputs, also if a cell fails. PARAMETERS is a JSON object: a cell that sets these values
and prints the path of the kernel's Python is inserted after the cell with the tag "parameters", as papermill does. This
is a process of its own because nbclient leaves sockets open, which tests would report as warnings.
"""

import json
import sys

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

notebook_path, out, parameters = sys.argv[1:]
notebook = nbformat.read(notebook_path, as_version=4)
tagged = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
lines = [f"{name} = {value!r}" for name, value in json.loads(parameters).items()]
lines += ["import sys", "print(sys.executable)"]
notebook.cells.insert(tagged + 1, nbformat.v4.new_code_cell("\n".join(lines), id="injected-parameters"))
# Without folders of kernel specs, "python3" is the Python of this process, whatever else is installed.
manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
try:
    NotebookClient(notebook, km=manager, timeout=600).execute()
finally:
    nbformat.write(notebook, out)

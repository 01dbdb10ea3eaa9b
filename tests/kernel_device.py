"""Where kernel tests run: natively on a GPU if there is one, else in Triton's interpreter on the CPU."""

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

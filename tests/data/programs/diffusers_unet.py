"""A denoising step with diffusers: noise, a scheduler, a small UNet, mean squared error."""

import torch
from diffusers import DDPMScheduler, UNet2DModel

device = "cuda"
blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (32,)}
model = UNet2DModel(sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, **blocks).to(device)
scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
images = torch.randn(4, 3, 8, 8, device=device)
for _ in range(8):
    noise = torch.randn(images.shape, device=device)
    times = torch.randint(0, scheduler.config.num_train_timesteps, (4,), device=device)
    noisy = scheduler.add_noise(images, noise, times)
    loss = torch.nn.functional.mse_loss(model(noisy, times).sample, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

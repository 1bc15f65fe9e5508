"""A small GAN: two networks, two optimizers, one step of the author's own."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import vivace

LATENT = 16


def networks():
    generator = nn.Sequential(
        nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    critic = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    return {"generator": generator, "critic": critic}


def optimizers(nets):
    return {
        name: torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for name, net in nets.items()
    }


def step(nets, optimizers, real):
    generator, critic = nets["generator"], nets["critic"]
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    fake = generator(torch.randn(len(real), LATENT))

    optimizers["critic"].zero_grad()
    loss_critic = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
    loss_critic.backward()
    optimizers["critic"].step()

    optimizers["generator"].zero_grad()
    loss_generator = bce(critic(fake), ones)
    loss_generator.backward()
    optimizers["generator"].step()
    return (loss_critic + loss_generator).detach()


def ring():
    angle = torch.linspace(0, 2 * torch.pi, 512)
    return torch.utils.data.DataLoader(
        torch.stack([angle.cos(), angle.sin()], 1), batch_size=64, shuffle=True
    )


job = vivace.Job(model=networks, data=ring, optimizer=optimizers, step=step, epochs=3)

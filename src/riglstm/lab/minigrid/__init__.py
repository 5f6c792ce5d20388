"""Agents on MiniGrid: levels, environments, recurrent PPO; needs the extra `rl`."""

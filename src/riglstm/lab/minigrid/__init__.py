"""Agents on MiniGrid: levels, environments, recurrent PPO, their table; needs the extra `rl`."""

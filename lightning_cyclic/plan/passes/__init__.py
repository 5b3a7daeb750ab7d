"""The program of a plan, made and checked pass by pass."""

"""The results of a survey: figures, advice, plots and an HTML page.

Only plots.py needs more than plain Python, and nothing here talks to a broker.
"""

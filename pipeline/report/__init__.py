"""What a survey finds, worked out and shown: figures, advice, plots, a page, words for a terminal.

Everything but plots.py is plain Python, and nothing here asks a broker.
"""

"""The benchmark suite: ``python -m bench --engines ... --shapes ...`` runs each engine in its own process and compares them.

native.py and paper_tables.py are programs of their own.
"""

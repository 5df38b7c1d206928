"""The native core (C++17 behind a plain C ABI) and its typed Python face."""

"""Boxes, masks and pictures from the outputs of networks on photos, and drawings of them.

:mod:`.heads` knows the layouts of outputs, :mod:`.boxes` suppresses what overlaps, :mod:`.viewer` runs a
network on images of any size, :mod:`.pictures` draws.
"""

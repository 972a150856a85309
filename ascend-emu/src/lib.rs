//! CPU emulation.

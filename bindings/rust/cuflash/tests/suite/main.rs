//! The tests of the crate, one program: those of a GPU say why they do nothing where there is none.

mod bad_input;
mod cache;
mod cpu;
mod driver;
mod elements;
mod errors;
mod features;
mod gpu;
mod library;
mod reference;
mod threads;

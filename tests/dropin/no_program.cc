// Does nothing: how it is linked is what is looked at.
int main() {}

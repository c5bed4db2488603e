// The views of this trace: first what its modality has, then those of every trace.
addPatterns();
addPictures();
addDenoising();
addSound();
addActions();
addText();
addTree();
addKept();
addRace();
addAcceptance();
addTimes();
begin();

// The views of this trace: those of text first, then what its modality has.
addPatterns();
addText();
addTree();
addRace();
addAcceptance();
addTimes();
begin();
